"""Allow binding a pre-authorized hold to its request after expiry, following an outage."""

from __future__ import annotations

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

ENDED = "OLD.state <> 'held'"
# An unbound hold has its own id as request id. Binding changes the request and shrinks the charge.
BOUND_LATE = (
    "OLD.state = 'expired' AND NEW.state = 'expired' AND OLD.request_id = OLD.id AND NEW.ended_at = OLD.ended_at "
    "AND NEW.delivered_token_count = OLD.delivered_token_count AND NEW.input_token_count <= OLD.input_token_count "
    "AND NEW.leased_token_count <= OLD.leased_token_count"
)


def replace_trigger(condition: str) -> None:
    op.execute("DROP TRIGGER holds_end_once ON holds")
    op.execute(
        f"CREATE TRIGGER holds_end_once BEFORE UPDATE ON holds FOR EACH ROW WHEN ({condition}) EXECUTE FUNCTION hold_ends_once()"
    )


def upgrade() -> None:
    replace_trigger(f"{ENDED} AND NOT ({BOUND_LATE})")


def downgrade() -> None:
    replace_trigger(ENDED)
