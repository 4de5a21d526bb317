"""Lanes: where a plan's batches are launched. Each launch is asynchronous and answers with a ticket."""
