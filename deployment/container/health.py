"""Exit with 0 if the server in this container answers GET /health with 200, otherwise with 1.

The port is 8000, or that of HARDPOINT_HEALTH_PORT.
"""

import os
import sys
import urllib.error
import urllib.request

SECONDS = 4.0

port = os.environ.get("HARDPOINT_HEALTH_PORT", "8000")
try:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=SECONDS) as answer:
        print(answer.status)
except (OSError, urllib.error.URLError) as error:
    print(error, file=sys.stderr)
    sys.exit(1)
