# SPDX-License-Identifier: Apache-2.0
"""The local build, without Nix: `python setup.py build_kernel` (see tools/local_build.py and --help).

kernel-builder's generated project has a setup.py with the same command; this one needs only a compiler and ninja.
(`kernel-builder create-pyproject --force` overwrites this file; git brings it back.)
"""

import sys

if sys.version_info < (3, 11):
    sys.exit("error: the local build needs Python 3.11 or newer, this is %d.%d" % sys.version_info[:2])

from tools.local_build import main  # noqa: E402  (a clear sentence on an old Python comes first)

main()
