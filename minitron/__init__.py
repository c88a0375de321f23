"""minitron: training large language models, from one device to thousands.

Layers are folders, techniques are files; imports go downwards only:

    cli | course                      what a person types; the teaching tools
    train                             the loop
    checkpoint | corpus               sharded save and load; where tokens come from
    model | dataset | measure         what is trained; which tokens a rank reads; the instruments
    cost                              bytes, FLOPs and communication as formulas
    config                            what a run is told
"""

__version__ = "0.1.0"
