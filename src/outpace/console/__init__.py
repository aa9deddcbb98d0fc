"""What the command line does, apart from parsing: loading, prompts, runs, the race, the chat, the tables.

Nothing here is imported before a command runs, so that ``outpace --help`` loads no torch.
"""
