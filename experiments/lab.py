"""A network of this machine's own for programs that need several hosts: scripts/netlab.sh, from `with` to its end.

It needs root. leaves=1 or oversub=0 is one switch for all hosts; else each leaf has an uplink of its hosts' rates
divided by oversub. order=alternating deals the hosts out to the leaves in turn.
"""

import os
import re
import subprocess
from typing import Any

from experiments.flags import ROOT
from fef.config import UserError

NETLAB = ROOT / "scripts" / "netlab.sh"
NETLAB_TIMEOUT_S = 60.0
PORT = 7711  # the coordinator's; nothing else listens in a namespace of our own
DEFAULTS = {"leaves": "2", "nic": "1000mbit", "oversub": "4", "order": "leaf"}


class Lab:
    """The lab network, from `with` to its end.

    Args:
      prefix: of its namespaces.
      hosts: how many.
      options: the text of --lab.

    Raises:
      UserError: an option that cannot be, or no right to build a lab.
    """

    def __init__(self, prefix: str, hosts: int, options: str):
        chosen = _parse(options)
        self.settings = {
            "P": prefix, "N": str(hosts), "LEAVES": chosen["leaves"], "NIC": chosen["nic"],
            "OVERSUB": chosen["oversub"], "ORDER": chosen["order"], "UPLINK": "", "NET": "10.77.0",
        }  # fmt: skip
        self.environment = os.environ | self.settings
        self.coordinator = f"{self.address(0)}:{PORT}"

    def __enter__(self) -> "Lab":
        # Its input ends when this program does, even by SIGKILL.
        self._remover = subprocess.Popen(
            ["sh", "-c", 'read _; exec "$0" down', NETLAB], env=self.environment, stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            self._netlab("up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        assert self._remover.stdin is not None
        self._remover.stdin.close()
        self._remover.wait(NETLAB_TIMEOUT_S)

    def address(self, host: int) -> str:
        """A host's on the lab."""
        return f"{self.settings['NET']}.{host + 1}"

    def command(self, host: int, words: list[str]) -> list[str]:
        """What runs `words` on a host."""
        return [str(NETLAB), "exec", str(host), "env", *(f"-u{name}" for name in self.settings), *words]

    def leaf(self, host: int) -> str:
        """The name of the leaf on which a host stands, as netlab.sh deals them out."""
        hosts, leaves = int(self.settings["N"]), int(self.settings["LEAVES"])
        if self.settings["OVERSUB"] == "0":
            leaves = 1
        return f"leaf{host % leaves if self.settings['ORDER'] == 'alternating' else host // -(-hosts // leaves)}"

    def bytes(self) -> list[dict[str, int]]:
        """Bytes so far on each host's link, {"host": ..}, and behind them on each leaf's uplink, {"leaf": ..}.

        Sent and received by the host, or by the leaf's hosts together, with all headers.
        """
        text = self._netlab("bytes")
        rows = []
        for name, what, sign in (("host", "h", 1), ("leaf", "up", -1)):
            ports = re.findall(rf"^{what}(\d+) in (\d+) out (\d+)$", text, re.MULTILINE)
            for number, *counts in sorted(ports, key=lambda port: int(port[0])):
                sent, received = counts[::sign]  # a switch sends on an uplink what its hosts have sent
                rows.append({name: int(number), "sent_bytes": int(sent), "received_bytes": int(received)})
        return rows

    def _netlab(self, word: str) -> str:
        done = subprocess.run(
            [NETLAB, word],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=NETLAB_TIMEOUT_S,
            start_new_session=True,
        )
        if done.returncode:
            raise UserError(f"--lab: {done.stderr.strip() or f'netlab.sh {word} ended with {done.returncode}'}")
        return done.stdout


def _parse(text: str) -> dict[str, str]:
    chosen = dict(DEFAULTS)
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in chosen:
            raise UserError(f"--lab={text}: unknown {name!r}; there are {', '.join(chosen)}")
        chosen[name] = value
    rate = re.fullmatch(r"(\d+)(mbit|gbit)", chosen["nic"])
    if not rate:
        raise UserError(f"--lab={text}: nic={chosen['nic']}: write a rate such as 100mbit or 1gbit")
    chosen["nic"] = str(int(rate[1]) * (1000 if rate[2] == "gbit" else 1))
    return chosen
