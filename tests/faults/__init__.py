"""Faults that take too long for `make test`: `make test-faults`, `make soak` and the fuzzing of saved states."""
