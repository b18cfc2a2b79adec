"""The control plane: tasks in, sessions to nodes, results out."""
