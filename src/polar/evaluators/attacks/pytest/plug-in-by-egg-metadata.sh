# Metadata as `setup.py develop` leaves it in the workspace, that makes pytest load a plug-in.
plant pytest-liar liar_plugin.py
plant entry_points.txt liar.egg-info/entry_points.txt
plant metadata liar.egg-info/PKG-INFO
