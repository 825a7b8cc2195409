"""Names inside a run folder that more than one command knows."""

CONFIG_FILE = "config.toml"  # the resolved configuration
RUN_FILE = "run.json"  # what the processes start from
LOGS_FOLDER = "logs"  # one file a process
ENGINES_FOLDER = "engines"  # engine-0.json and so on: where each engine listens
ADDRESS_FILE = "scheduler.json"  # where the scheduler listens; the trainer waits for it
HEARTBEAT_FILE = "scheduler.heartbeat"  # a number that the scheduler counts up for as long as it lives
LEDGER_FILE = "ledger.sqlite"  # what became of every prompt
STOP_FILE = "stop"  # whoever makes it wants the run to save and end
CHECKPOINTS_FOLDER = "checkpoints"  # step-000040/ and so on
SUMMARY_FILE = "scheduler_summary.json"  # the scheduler's counts, however the run ended
RESULT_FILE = "result.json"  # the trainer's figures, after a whole run
EXPORT_FOLDER = "export"  # the policy as a HF folder
