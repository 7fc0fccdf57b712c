"""Steps in stages of a pipeline: messages, runs, updates."""
