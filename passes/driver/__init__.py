"""Run `autoshard.compile`, `plan`, `price`, `prove` and `verify`: call the other passes in order."""
