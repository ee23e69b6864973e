"""Helpers that know nothing of attention: words of messages, optional packages, the machine, ranks."""
