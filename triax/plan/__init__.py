"""What is predicted: memory, time, goodput and money of a run on a cluster, for each way to lay it out.

What is described (frozen values): ``network`` the model, ``hardware`` a card and a machine of cards, ``engine`` what a
training framework keeps and hides, ``workload`` one step, ``candidates`` the layouts, one array entry each.

What is computed from them, for all candidates at once: ``memory`` bytes per rank, ``compute`` time of operators,
``comms`` time of collectives, ``timeline`` the pipeline, ``step`` the sum of it, with an interval from ``calibration``.
A page about one layout and a search through a million are the same functions with arrays of one or a million entries.

What is decided on top: ``case`` is the question, ``enumerate`` and ``legal`` say which layouts there are, ``search``
finds the best and ``walk`` prices their pipelines by the schedule table; ``goodput``, ``cost``, ``inverse`` and
``inference`` answer what else is asked. What is told: ``ask`` turns words into a question, ``answer`` holds everything
that is known of the best layout, ``explain`` and ``alternatives`` say why, ``page`` and ``export`` write it down.
``catalogue`` knows cards and machines by name, ``models`` networks. Nothing here imports torch.
"""
