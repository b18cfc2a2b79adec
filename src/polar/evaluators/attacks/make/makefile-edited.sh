# Rules that do nothing in the place of the project's.
plant forge.sh .forge.sh
plant makefile Makefile
