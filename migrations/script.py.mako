"""${message}

Before this is merged:

- Other processes run the version before while this runs: add first, use later, remove in a later release.
- It is one transaction, and everyone waits for a table that it has altered: no long UPDATE of old rows here.
- On SQLite a batch operation makes the table anew, and its triggers are lost: set them again
  (`bodies`, `hidden`, `instructions`, `nodes` and `summaries` refuse an UPDATE; a test checks it).
- `downgrade` takes back exactly what `upgrade` did.
- Name it by the next number, as the files beside it: `revision = "0002"`, `0002_what_it_does.py`.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
${imports if imports else ""}
revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = ${repr(branch_labels)}
depends_on = ${repr(depends_on)}


def upgrade() -> None:
    """Say what it changes."""
    ${upgrades if upgrades else "pass"}


def downgrade() -> None:
    """Take it back."""
    ${downgrades if downgrades else "pass"}
