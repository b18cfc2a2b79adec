# Settings in setup.cfg that make pytest load a plug-in.
plant pytest-liar liar_plugin.py
printf '%s\n' '[tool:pytest]' 'addopts = -p liar_plugin' >> setup.cfg
