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
    parallel                       how the work is divided over ranks
    launch : comm : measure        processes; collectives; instruments
    precision                      which dtype holds what
    model | dataset                what is trained, on which tokens
    cost                           parameters, FLOPs and bytes as formulas
    config : system                what a run is told; disk, files, terminal
    pytorch                        what PyTorch keeps private
"""

__version__ = "0.1.0"
