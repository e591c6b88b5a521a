"""`edgeserve service print`: the text of a user service. Nothing is installed or started."""

from __future__ import annotations

import shlex
import sys
from xml.sax.saxutils import escape

from edgeserve.config import ServerConfig
from edgeserve.errors import UsageError

_SYSTEMD = """\
# Save as ~/.config/systemd/user/edgeserve.service, then:
#   systemctl --user daemon-reload && systemctl --user enable --now edgeserve
[Unit]
Description=edgeserve, a local server for language models
After=network.target

[Service]
ExecStart={command}
Restart=on-failure
RestartSec=5
# Longer than --drain-timeout, so that running answers can end.
TimeoutStopSec={stop_s}
Environment=PYTHONUNBUFFERED=1

[Install]
WantedBy=default.target
"""

_LAUNCHD = """\
<?xml version="1.0" encoding="UTF-8"?>
<!-- Save as ~/Library/LaunchAgents/edgeserve.plist, then:
     launchctl bootstrap gui/$(id -u) ~/Library/LaunchAgents/edgeserve.plist -->
<!DOCTYPE plist PUBLIC "-//Apple//DTD PLIST 1.0//EN" "http://www.apple.com/DTDs/PropertyList-1.0.dtd">
<plist version="1.0">
<dict>
  <key>Label</key><string>edgeserve</string>
  <key>ProgramArguments</key>
  <array>
{arguments}
  </array>
  <key>RunAtLoad</key><true/>
  <key>KeepAlive</key><dict><key>SuccessfulExit</key><false/></dict>
  <!-- Longer than the drain timeout, so that running answers can end. -->
  <key>ExitTimeOut</key><integer>{stop_s}</integer>
  <key>StandardErrorPath</key><string>/tmp/edgeserve.log</string>
</dict>
</plist>
"""


def show(system: str, reference: str | None) -> int:
    """Print the definition for "systemd" or "launchd", for exactly this installation."""
    command = [sys.executable, "-m", "edgeserve", "serve", *([reference] if reference else [])]
    stop_s = int(ServerConfig().drain_timeout_s) + 15
    if system == "systemd":
        # A percent sign is the beginning of a specifier in a unit file.
        text = _SYSTEMD.format(command=shlex.join(command).replace("%", "%%"), stop_s=stop_s)
    elif system == "launchd":
        arguments = "\n".join(f"    <string>{escape(part)}</string>" for part in command)
        text = _LAUNCHD.format(arguments=arguments, stop_s=stop_s)
    else:
        raise UsageError(f"There is no service system {system}.", "One of: systemd, launchd.")
    print(text, end="")
    return 0
