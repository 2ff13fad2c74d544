"""Generate in Celery: a task that is delivered twice is billed once.

Start a worker with `celery -A celery_task worker`, then call `summarize.delay("…")`.
"""

import os

from celery import Celery, Task
from weir_client import AlreadyExists, Client, Unavailable

app = Celery(
    "celery_task",
    broker=os.environ.get("CELERY_BROKER_URL", "redis://localhost:6379/0"),
    backend=os.environ.get("CELERY_RESULT_BACKEND", "redis://localhost:6379/1"),
)


@app.task(bind=True, acks_late=True, autoretry_for=(Unavailable,), retry_backoff=True)
def summarize(task: Task, text: str) -> dict[str, str]:
    """Return a summary and its cost. Celery may run it again after the loss of a worker."""
    request_id = task.request.id  # a UUID that stays the same: the idempotency key
    with Client() as client:  # a client of its own: connections do not survive Celery's forks
        try:
            result = client.complete(
                "demo",
                f"Summarize in one sentence:\n\n{text}",
                max_output_tokens=100,
                request_id=request_id,
                keep_on_disconnect=600,  # seconds for which the server keeps the answer
                tier="batch",
            )
        except AlreadyExists:  # an earlier delivery ran it to its end: fetch that answer
            result = client.attach(request_id).wait()
    return {"text": result.text, "cost": str(result.cost)}
