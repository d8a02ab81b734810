"""What is triax: one tool that plans how a model lies on a cluster, trains it in that layout and measures both."""

__version__ = "0.1.0"
