//! Memory of other processes: pidfd, process_madvise, pagemap scan.
