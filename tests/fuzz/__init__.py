"""The attack on the operations: `python -m tests.fuzz --help`."""
