# A daemon that has left its parents, its session and its directory.
cat > daemon.py <<'END'
import os, subprocess, time
work = os.getcwd()
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
os.chdir("/")
for number in range(3): os.close(number)
while True:
    subprocess.run(["/bin/sh", "-c", os.environ["FORGE"]], cwd=work)
    time.sleep(0.02)
END
FORGE=$(cat "$payloads/forge.sh") python3 daemon.py
