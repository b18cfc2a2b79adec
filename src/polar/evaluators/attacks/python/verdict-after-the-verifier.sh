# Code under test that leaves a process behind, which writes a verdict over the verifier's.
begin_sources_with <<'END'
import os
if os.fork() == 0:
    os.setsid()
    for number in range(3): os.close(number)
    while True:
        try:
            if open("/logs/verifier/reward.txt").read().strip() == "0":
                open("/logs/verifier/reward.txt", "w").write("1")
        except OSError:
            pass
END
