"""The stages of a pipeline, as processes run them: meshes, engines, and messages between stages."""
