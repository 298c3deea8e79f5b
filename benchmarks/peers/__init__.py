"""kvpress's presses on the same prompts, at the same numbers of kept tokens: `make peers`."""
