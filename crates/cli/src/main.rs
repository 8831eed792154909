//! `homeostat`.

fn main() -> std::process::ExitCode {
    homeostat_cli::main()
}
