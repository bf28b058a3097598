"""Describe a party's status in words, and ask a running party to leave."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hyperpush.base.errors import InvalidInput
from hyperpush.base.locks import is_held
from hyperpush.deploy.options import party_folder
from hyperpush.deploy.watch import LEAVE, STATUS
from hyperpush.engines.transport.zenoh.neighbors import shown_time
from hyperpush.runs.events import read_events


def read_status(path: Path) -> tuple[Path, dict[str, Any]]:
    """Return the folder of a party and its last status, given the folder or the status file."""
    file = path / STATUS if path.is_dir() else path
    try:
        events = read_events(file)
        if events and "links" in events[-1]:
            return file.parent, events[-1]
    except (OSError, AttributeError, TypeError):
        pass
    raise InvalidInput("folder", str(path), f"the folder of a party that was started, or its {STATUS}")


def is_running(folder: Path) -> bool:
    """Return True if a process is running the party of this folder."""
    return is_held(party_folder(folder).lock)


def ask_to_leave(path: Path) -> str:
    """Ask a running party to transfer its mass and end. Return the line to show to the user."""
    folder, seen = read_status(path)
    if not is_running(folder):
        raise InvalidInput("folder", str(path), "the folder of a party that is running")
    if seen["mode"] != "asynchronous":
        allowed = "asynchronous: in step the others need every party; to stop this one use Ctrl-C or SIGTERM"
        raise InvalidInput("mode", seen["mode"], allowed)
    try:
        (folder / LEAVE).touch(0o600)
    except OSError as error:
        raise InvalidInput("folder", str(folder), f"a folder that can be written ({error.strerror})") from None
    return f"{seen['client']} hands over its mass at its next exchange and ends then"


def describe(path: Path) -> list[str]:
    """Return a party's status in words, one line per fact."""
    folder, seen = read_status(path)
    lines = [_head(seen, is_running(folder)), *_own(seen)]
    width = max((len(name) for name in seen["links"]), default=0)
    lines += [f"  {name:<{width}}  {_neighbor(name, link, seen)}" for name, link in seen["links"].items()]
    return lines + _refused(seen)


def _head(seen: Mapping[str, Any], running: bool) -> str:
    ago = max(time.time() - seen["time"], 0.0)
    where = f", {seen['loop']} {seen['step']} of {seen['total']}" if "loop" in seen else ""
    state = f"running (process {seen['pid']})" if running else f"not running: {seen.get('ended') or 'it was killed'}"
    return f"{seen['client']}: {seen['mode']}, round {seen['round']:,}{where}; {state}; seen {ago:.1f} s ago"


def _own(seen: Mapping[str, Any]) -> list[str]:
    lines = [f"code not compared: {seen['code_not_compared']}"] if seen.get("code_not_compared") else []
    if seen.get("mass") is not None:
        lines.append(f"mass {seen['mass']:.3g}, of {seen['peers']} together")
    if seen.get("isolated"):
        lines.append(f"isolated: {seen['isolated']}")
    if seen.get("privacy"):
        spent = seen["privacy"]
        delta = f", δ {spent['delta']:g}" if spent["delta"] else ""
        lines.append(f"ε at most {spent['epsilon']:.4g}{delta}, of {spent['starts']} starts together")
    sizes = (f"{seen[f'{way}_bytes'] / 1e6:,.1f} MB {way}" for way in ("sent", "received"))
    return [*lines, ", ".join(sizes) + f", {seen['late']:,} messages late"]


def _neighbor(name: str, link: Mapping[str, Any], seen: Mapping[str, Any]) -> str:
    if link.get("closed"):
        return "removed"
    heard = "never heard" if link["last_seen"] is None else f"heard {link['last_seen']:.1f} s before"
    facts = ["here" if link["alive"] else "absent", heard]
    facts += [f"in step {link['step']:,}"] if link["step"] >= 0 else []
    if link.get("outages"):
        facts.append(f"lost {link['outages']} times, for {link['away']:g} s in all")
    if link.get("certificate_ends"):
        facts.append(f"certificate until {shown_time(link['certificate_ends'])}")
    facts += [f"{count} refused: {reason}" for reason, count in link.get("refused", {}).items()]
    return ", ".join([*facts, *([link["unfit"]] if link.get("unfit") else [])])


def _refused(seen: Mapping[str, Any]) -> list[str]:
    """Return a list with one line on refused messages and links by reason; an empty list if none were refused."""
    total = {**seen["rejected"]}
    for reason, count in seen["rejected_by_transport"].items():
        total[reason] = total.get(reason, 0) + count
    return [f"refused: {', '.join(f'{count:,} {reason}' for reason, count in total.items())}"] if total else []
