"""From completions to traces: the builders."""
