"""The intermediate representation: meshes, partition specs, programs, plans and reshards."""
