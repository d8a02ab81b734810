"""What is predicted: memory, time, goodput and money of a run on a cluster, for each way to lay it out.

What is described (frozen values): ``network`` the model, ``hardware`` a card and a machine of cards, ``engine`` what a
training framework keeps and hides, ``workload`` one step, ``candidates`` the layouts, one array entry each.

What is computed from them, for all candidates at once: ``memory`` bytes per rank, ``compute`` time of operators,
``comms`` time of collectives, ``timeline`` the pipeline, ``step`` the sum of it, with an interval from ``calibration``.
A page about one layout and a search through a million are the same functions with arrays of one or a million entries.

What is decided on top: ``goodput`` ``cost`` ``enumerate`` ``search`` ``explain`` ``inverse`` ``inference``;
``catalogue`` knows cards and machines by name. Nothing here imports torch.
"""
