"""What a run needs beside the method: checks, devices, processes, records of steps, states."""
