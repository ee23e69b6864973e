"""What a training run will cost before it runs: FLOPs, memory, time, from rates that were measured."""
