# Settings in tox.ini that make pytest load a plug-in.
plant pytest-liar liar_plugin.py
printf '%s\n' '[pytest]' 'addopts = -p liar_plugin' >> tox.ini
