# A GNUmakefile, which make prefers to the project's Makefile.
plant forge.sh .forge.sh
plant makefile GNUmakefile
