"""Stages of a pipeline: their meshes, engines and messages."""
