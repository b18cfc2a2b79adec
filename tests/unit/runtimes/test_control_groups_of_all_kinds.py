"""Where control groups are found and what is written to them: v1, v2 and both side by side."""

from __future__ import annotations

from pathlib import Path

import pytest

from polar.runtimes.base import Limit, Limits, SandboxError
from polar.runtimes.cgroups import Cgroup, Hierarchy, find_hierarchies, node_name, recorded_groups

LIMITS = Limits.model_validate({"memory": "1GiB", "pids": 99, "cpus": 1.5})

V1_HYBRID_OWN = "9:name=systemd:/\n8:pids:/\n4:memory:/a/b\n3:cpuset:/\n1:cpu,cpuacct:/x\n0::/\n"
V1_HYBRID_MOUNTS = """\
30 1 0:26 / {0} rw shared:9 - tmpfs tmpfs rw,mode=755
31 30 0:27 / {0}/pids rw - cgroup cgroup rw,pids
32 30 0:28 / {0}/memory rw - cgroup cgroup rw,memory
33 30 0:29 / {0}/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
34 30 0:30 / {0}/unified rw - cgroup2 cgroup2 rw
"""


def hybrid(directory: Path) -> list[Hierarchy]:
    (directory / "unified").mkdir()
    (directory / "unified" / "cgroup.controllers").write_text("hugetlb\n")
    return list(find_hierarchies(V1_HYBRID_OWN, V1_HYBRID_MOUNTS.format(directory)))


def test_each_controller_of_v1_has_its_own_place_and_an_empty_v2_none(tmp_path: Path) -> None:
    found = {next(iter(item.controllers)): item for item in hybrid(tmp_path)}
    assert {name: item.directory for name, item in found.items()} == {
        "pids": tmp_path / "pids",
        "memory": tmp_path / "memory" / "a" / "b",
        "cpu": tmp_path / "cpu,cpuacct" / "x",
    }
    assert not any(item.is_v2 for item in found.values())


def unified(directory: Path, own: str, root: str = "/") -> list[Hierarchy]:
    mounts = f"31 1 0:27 {root} {directory} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
    return list(find_hierarchies(f"0::{own}\n", mounts))


def test_v2_has_one_place_for_all(tmp_path: Path) -> None:
    place = tmp_path / "user.slice" / "polar.scope"
    place.mkdir(parents=True)
    (place / "cgroup.controllers").write_text("cpuset cpu io memory hugetlb pids\n")
    (found,) = unified(tmp_path, "/user.slice/polar.scope")
    assert found == Hierarchy(place, is_v2=True, controllers=frozenset({"cpu", "memory", "pids"}))


def test_inside_a_container_the_mounted_part_counts(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("memory pids\n")
    (found,) = unified(tmp_path, "/docker/abc", root="/docker/abc")
    assert found.directory == tmp_path
    (hidden,) = unified(tmp_path, "/somewhere/else", root="/docker/abc")
    assert hidden.directory == tmp_path


def test_paths_with_spaces_are_understood(tmp_path: Path) -> None:
    place = tmp_path / "c group"
    place.mkdir()
    (place / "cgroup.controllers").write_text("memory\n")
    mounts = f"31 1 0:27 / {str(place).replace(' ', chr(92) + '040')} rw - cgroup2 cgroup2 rw\n"
    assert next(find_hierarchies("0::/\n", mounts)).directory == place


def made(tmp_path: Path, hierarchy: Hierarchy) -> tuple[Cgroup, Path]:
    root = tmp_path / "sessions" / "s1"
    root.mkdir(parents=True)
    group = Cgroup.make(root, LIMITS, [hierarchy])
    return group, hierarchy.directory / node_name(root.parent) / "sandbox-s1"


def content(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in directory.iterdir()}


def test_limits_of_v2_are_written(tmp_path: Path) -> None:
    place = tmp_path / "cgroup"
    place.mkdir()
    group, directory = made(tmp_path, Hierarchy(place, True, frozenset({"memory", "pids", "cpu"})))
    assert content(directory) == {
        "memory.max": str(1024**3),
        "pids.max": "99",
        "cpu.max": "150000 100000",
    }
    assert (directory.parent / "cgroup.subtree_control").read_text() == "+cpu +memory +pids"
    assert group.enforces == {Limit.MEMORY, Limit.PIDS, Limit.CPU}
    assert group.join_files == (str(directory / "cgroup.procs"),)


def test_limits_of_v1_are_written(tmp_path: Path) -> None:
    place = tmp_path / "cgroup"
    place.mkdir()
    group, directory = made(tmp_path, Hierarchy(place, False, frozenset({"memory", "cpu"})))
    assert content(directory) == {
        "memory.limit_in_bytes": str(1024**3),
        "cpu.cfs_period_us": "100000",
        "cpu.cfs_quota_us": "150000",
    }
    assert group.enforces == {Limit.MEMORY, Limit.CPU}


@pytest.mark.parametrize(
    ("is_v2", "files"),
    [
        (True, {"memory.events": "low 0\noom 3\noom_kill 5\n", "pids.events": "max 7\n"}),
        (False, {"memory.oom_control": "oom_kill_disable 0\noom_kill 3\n", "pids.events": "max 7\n"}),
        (
            False,
            {
                "memory.oom_control": "oom_kill 3\n",
                "memory.failcnt": "0\n",  # as newer kernels leave it
                "memory.max_usage_in_bytes": "511938560\n",
                "memory.limit_in_bytes": "512000000\n",
                "pids.events": "max 7\n",
            },
        ),
    ],
)
def test_refusals_are_counted(tmp_path: Path, is_v2: bool, files: dict[str, str]) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    group = Cgroup({tmp_path: Hierarchy(tmp_path, is_v2, frozenset({"memory", "pids"}))})
    assert group.refusals() == {Limit.MEMORY: 3, Limit.PIDS: 7}


@pytest.mark.parametrize(
    ("is_v2", "files"),
    [
        (True, {"memory.events": "oom 0\noom_kill 3\n"}),
        (
            False,
            {
                "memory.oom_control": "oom_kill 3\n",
                "memory.max_usage_in_bytes": "400000000\n",
                "memory.limit_in_bytes": "512000000\n",
            },
        ),
    ],
)
def test_a_process_that_the_machine_had_no_memory_for_hit_no_limit_of_its_own(
    tmp_path: Path, is_v2: bool, files: dict[str, str]
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    group = Cgroup({tmp_path: Hierarchy(tmp_path, is_v2, frozenset({"memory"}))})
    assert group.refusals() == {Limit.MEMORY: 0}
    assert group.memory_kills() == 3


def test_a_group_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="cannot set the sandbox's limits"):
        made(tmp_path, Hierarchy(tmp_path / "absent", True, frozenset({"memory"})))


def test_only_a_sandboxs_own_groups_are_believed(tmp_path: Path) -> None:
    root = tmp_path / "sessions" / "s1"
    root.mkdir(parents=True)
    for name in ("sandbox-s1", "sandbox-s2", "important"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cgroup.procs").write_text("")
    (tmp_path / "x" / "sandbox-s1").mkdir(parents=True)
    names = ("sandbox-s1", "sandbox-s2", "important", "x/sandbox-s1")
    (root / "cgroups").write_text("".join(f"{tmp_path / name}\n" for name in names))
    assert recorded_groups(root) == [tmp_path / "sandbox-s1"]
    assert recorded_groups(tmp_path / "absent") == []
