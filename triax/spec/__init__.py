"""What do we say: the run, the cluster, the layout and the three tables both planner and trainer read. No torch."""
