"""Commands killed at every event of the file system: nothing half made, nothing lost, nothing left."""
