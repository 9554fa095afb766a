"""The framework's core: launch, meshes, the data plane, pure functions. Imports no other room."""
