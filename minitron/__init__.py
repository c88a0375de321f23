"""minitron: training large language models, from one device to thousands.

Layers are folders, techniques are files; imports go downwards only:

    cli                                 what you type
    course                              exercises, graders, figures, the doctor
    plan                                before a launch: which hardware, what it costs
    train                               the loop
    train_log                           what a run tells while it trains
    run | hugging_face                  what a run owns and saves; weights for others, from others
    run_memory                          does it fit, before anything is built?
    run_checks | run_folder             does all fit together? who trains in a folder?
        | stopping | training           how all ranks end after the same step; what trains
    parallelize | checkpoint            in which order a model is cut; save and load
        | corpus | step                 where tokens come from; one step
    parallel                            how the work is cut over ranks
    comm : measure                      how ranks talk; the instruments
    model | dataset | process           what is trained; which tokens; which device
    cost                                parameters, FLOPs and bytes as formulas
    command_line | config_file          command lines from dataclasses; TOML files
        | progress                      what takes long
    disk                                what a disk refuses
    config | files                      what a run is told; files that others may have written
    config_checks                       one-line errors
"""

__version__ = "0.1.0"
