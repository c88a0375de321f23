"""minitron: training large language models, from one device to thousands.

Layers are folders, techniques are files, and imports go downward only:

    cli                            the command line
    plan                           before a launch: fit, speed, duration, price
    train                          the loop
    train_log                      what a run reports while it trains
    run | hugging_face | proof     what a run owns and saves; weights for others; the oracle
    running                        checks, the run's folder, memory, stopping, the state that trains
    parallelize | checkpoint       divide a model over ranks; save and load
        | corpus | step            where tokens come from; one training step
    parallel | launch              divide the work over ranks; start them, and say why one hangs
    measure                        the instruments
    comm | precision | dataset     collectives; which dtype holds what; which tokens a rank reads
    model                          what is trained
    cost                           parameters, FLOPs and bytes as formulas
    config                         a run's configuration
    system                         disk, files, terminal; mistakes of users, as data
    pytorch                        what PyTorch keeps private
"""

__version__ = "0.1.0"
