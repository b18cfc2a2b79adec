# Metadata in capital letters, which Python reads as well, that makes pytest load a plug-in.
plant pytest-liar liar_plugin.py
plant entry_points.txt LIAR-1.0.DIST-INFO/entry_points.txt
plant metadata LIAR-1.0.DIST-INFO/METADATA
