# Code under test that leaves verdict files which nobody can write to any more.
begin_sources_with <<END
import subprocess
subprocess.run(["/bin/sh", "-c", r'''
$(cat "$payloads/forge.sh")
chmod -R a-w /logs/verifier
'''])
END
