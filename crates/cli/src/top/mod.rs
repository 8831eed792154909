//! `homeostat top`: the living state of the daemon, or a recording, on the screen.
//!
//! [`model`] knows what there is to see, [`draw`] turns it into cells, and this file connects both to the terminal and to
//! where the moments come from. The screen is drawn only when something changed, in one piece, and the terminal is put
//! back on every way out: the end, a failure, a signal, a panic.

mod cells;
pub mod draw;
pub mod model;
mod screen;

use crate::failure::Failure;
use cells::Cells;
use draw::Look;
use homeostat_daemon::api::{Status, StoryLine};
use homeostat_daemon::client::{Client, ClientError};
use homeostat_daemon::recordings;
use model::{Model, Origin, Wish};
use screen::Screen;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::time::{Duration, Instant};

/// How often the daemon is asked. It publishes its state as often.
const ASK_EVERY: Duration = Duration::from_secs(1);
/// How soon news is seen, and the longest time that a signal waits.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// One step of a recording that runs by itself.
const PLAY_EVERY: Duration = Duration::from_millis(200);
/// Moments of a recording that are worth a place: one in so many seconds of recorded time.
const RECORDED_EVERY_S: u64 = 1;
/// News that wait to be looked at.
const QUEUE: usize = 4;
/// What comes from the daemon.
enum News {
    Seen(Box<Status>, Vec<StoryLine>),
    Lost(String),
}

/// Watches the daemon until the reader leaves.
///
/// # Errors
/// No daemon answers at the beginning, or the terminal can not be used.
pub fn watch(socket: PathBuf, look: Look) -> Result<(), Failure> {
    // Before the screen is taken, so that the message can be read.
    Client::connect(&socket)?;
    let (sender, news) = sync_channel(QUEUE);
    std::thread::Builder::new()
        .name("daemon".into())
        .spawn(move || ask(&socket, &sender))
        .map_err(|e| Failure::failed(format!("cannot start: {e}")))?;
    show(Model::new(Origin::Daemon), Some(news), look)
}

/// Shows a recording.
///
/// # Errors
/// It can not be read, or the terminal can not be used.
pub fn replay(path: &Path, look: Look) -> Result<(), Failure> {
    let name = path
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    let mut model = Model::new(Origin::Recording(name));
    recordings::watch(path, RECORDED_EVERY_S, |status, lines| model.learn(status, lines))
        .map_err(|e| Failure::from_error(&e))?;
    if model.moment().is_none() {
        return Err(Failure::failed("the recording holds nothing to be seen"));
    }
    model.rewind();
    model.wish(Wish::Hold);
    show(model, None, look)
}

/// Asks the daemon again and again. Ends when nobody listens any more.
fn ask(socket: &Path, sender: &SyncSender<News>) {
    let mut since = 0;
    let mut client: Option<Client> = None;
    loop {
        let begin = Instant::now();
        let answer = look_at(&mut client, socket, &mut since);
        let news = match answer {
            Ok((status, lines)) => News::Seen(Box::new(status), lines),
            Err(e) => {
                client = None;
                // A daemon that comes back counts its lines from the beginning.
                since = 0;
                News::Lost(e.to_string())
            }
        };
        if sender.send(news).is_err() {
            return;
        }
        std::thread::sleep(ASK_EVERY.saturating_sub(begin.elapsed()));
    }
}

fn look_at(
    client: &mut Option<Client>,
    socket: &Path,
    since: &mut u64,
) -> Result<(Status, Vec<StoryLine>), ClientError> {
    let client = match client {
        Some(client) => client,
        None => client.insert(Client::connect(socket)?),
    };
    let status = client.status()?;
    let part = client.story(*since)?;
    *since = part.next;
    Ok((status, part.lines))
}

/// The terminal, taken; given back when this goes.
struct Taken {
    screen: Screen<std::io::Stdout>,
}

impl Taken {
    fn take() -> std::io::Result<Self> {
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            screen::give_back();
            hook(info);
        }));
        let taken = screen::take();
        if taken.is_err() {
            screen::give_back();
        }
        taken?;
        Ok(Self {
            screen: Screen::onto(std::io::stdout()),
        })
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        screen::give_back();
    }
}

fn show(mut model: Model, mut news: Option<Receiver<News>>, look: Look) -> Result<(), Failure> {
    let ended = Arc::new(AtomicBool::new(false));
    for signal in [
        signal_hook::consts::SIGTERM,
        signal_hook::consts::SIGINT,
        signal_hook::consts::SIGHUP,
        signal_hook::consts::SIGQUIT,
    ] {
        signal_hook::flag::register(signal, ended.clone())
            .map_err(|e| Failure::failed(format!("cannot watch for signals: {e}")))?;
    }
    let trouble = |e: std::io::Error| Failure::failed(format!("the terminal can not be used: {e}"));
    let mut taken = Taken::take().map_err(trouble)?;
    let mut played = Instant::now();
    let mut size = None;
    let mut changed = true;
    while !ended.load(Ordering::Relaxed) && !model.quit() {
        let now = Some(screen::size().map_err(trouble)?);
        changed |= now != size;
        size = now;
        if let (true, Some((width, height))) = (changed, now) {
            let mut picture = Cells::blank(width, height);
            let (seen, scroll_max) = draw::draw(&model, &mut picture, look);
            model.drawn(seen, scroll_max);
            taken.screen.show(picture).map_err(trouble)?;
        }
        changed = false;
        let Some(wishes) = screen::keys(LOOK_EVERY).map_err(trouble)? else {
            break;
        };
        for wish in wishes {
            if wish == Wish::Repaint {
                taken.screen.clear();
            }
            model.wish(wish);
            changed = true;
        }
        changed |= take_news(&mut news, &mut model);
        if played.elapsed() >= PLAY_EVERY {
            played = Instant::now();
            changed |= model.play();
        }
    }
    Ok(())
}

fn take_news(news: &mut Option<Receiver<News>>, model: &mut Model) -> bool {
    let mut changed = false;
    while let Some(receiver) = news {
        match receiver.try_recv() {
            Ok(News::Seen(status, lines)) => {
                model.learn(*status, lines);
                changed = true;
            }
            Ok(News::Lost(why)) => {
                changed |= model.trouble() != Some(&why);
                model.lose(why);
            }
            Err(TryRecvError::Empty) => break,
            Err(TryRecvError::Disconnected) => *news = None,
        }
    }
    changed
}
