# An installed package's metadata in the workspace that makes pytest load a plug-in.
plant pytest-liar liar_plugin.py
plant entry_points.txt liar-1.0.dist-info/entry_points.txt
plant metadata liar-1.0.dist-info/METADATA
