"""What is Celery's alone.  Importing it imports nothing of Celery."""
