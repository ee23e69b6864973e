"""The cost of a training run before it runs: FLOPs, memory, time, from rates that were measured."""
