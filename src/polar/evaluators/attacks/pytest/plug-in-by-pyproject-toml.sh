# Settings in pyproject.toml that make pytest load a plug-in.
plant pytest-liar liar_plugin.py
printf '%s\n' '[tool.pytest.ini_options]' 'addopts = "-p liar_plugin"' >> pyproject.toml
