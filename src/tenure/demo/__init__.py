"""The demonstration: a recorded agent run, played through the real system while its owner is killed.

director    starts the processes, kills the owner, waits for the end
worker      what the workers run: a parent that delegates, and its children
trajectory  recorded runs, as messages
audit       every law over the ledger, and each transcript against its file
view        what a person sees
"""
