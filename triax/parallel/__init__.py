"""How is a layout made real: ranks, mesh, split and sharded weights, collectives?"""
