# Metadata as a link to a directory of another name, that makes pytest load a plug-in.
plant pytest-liar liar_plugin.py
plant entry_points.txt notes/entry_points.txt
plant metadata notes/METADATA
ln -s notes liar-1.0.dist-info
