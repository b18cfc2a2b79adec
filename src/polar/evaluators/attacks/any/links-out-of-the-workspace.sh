# Links to the system, to the verifier's places and to other processes.
ln -s / root
ln -s /proc/1/root host
ln -s /proc/1/environ environ
ln -s /logs/verifier verifier
ln -s /tests hidden
ln -s .. up
ln -s loop loop
