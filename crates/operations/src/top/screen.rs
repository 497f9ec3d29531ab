//! The live view of `ritornello top`, redrawn on a terminal.

use super::snapshot::{Sample, Snapshot};
use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Color, Style, Stylize};
use ratatui::text::Line;
use ratatui::widgets::{Gauge, Row, Table};
use ritornello_format::ErrorKind;
use ritornello_store::OwnerSilent;
use ritornello_terminal::exit::Failure;
use ritornello_terminal::print::{percent, print_stderr};
use signal_hook::consts::{SIGHUP, SIGTERM};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};

const REFRESH: Duration = Duration::from_secs(1);
/// The pause between samples while the owner answers no handshake.
const SILENT_REFRESH: Duration = Duration::from_secs(5);
/// Interval of checks for a new sample while the screen waits for keys.
const SAMPLE_CHECK: Duration = Duration::from_millis(100);
/// Width of the column of labels, in characters. The longest label, `per second`, has ten.
const NAME_WIDTH: u16 = 10;

/// Shown while the store has no owner.
const UNOWNED: &str = "no process owns the store: waiting for an owner";

/// A sample; `None` if no process owns the store.
type Sampled = ritornello_format::Result<Option<Sample>>;

/// Waits until a process owns the store if `first` is `None`, and draws the store until the user or
/// a signal ends the view. `sample` takes the further samples.
///
/// # Errors
/// If the wait for an owner fails, or the terminal cannot be drawn on.
pub fn watch(
    first: Option<Sample>,
    sample: impl Fn() -> Sampled + Send + 'static,
) -> Result<(), Failure> {
    let mut last = match first {
        Some(first) => first,
        None => {
            print_stderr(&format!("{UNOWNED} (Ctrl-C ends)"));
            wait_for_owner(&sample, REFRESH)?
        }
    };
    let ended = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&ended))?;
    }
    let mut terminal = ratatui::try_init()?;
    let mut trouble = String::new();
    let samples = sample_in_background(sample);
    let mut shown = Snapshot::between(None, &last);
    let result = loop {
        if let Err(error) = terminal.draw(|frame| draw(frame, &shown, &trouble)) {
            break Err(error.into());
        }
        match quit_within(SAMPLE_CHECK) {
            Ok(true) => break Ok(()),
            Err(error) => break Err(error.into()),
            Ok(false) if ended.load(Ordering::Relaxed) => break Ok(()),
            Ok(false) => {}
        }
        // The channel is empty until the next sample, which takes long if the owner is slow.
        let Ok(sampled) = samples.try_recv() else { continue };
        match sampled {
            Ok(Some(now)) => {
                shown = Snapshot::between(Some(&last), &now);
                last = now;
                trouble.clear();
            }
            // Keep the last statistics on the screen, because the store may be changing its owner.
            Ok(None) => trouble = UNOWNED.to_owned(),
            Err(error) => trouble = error.to_string(),
        }
    };
    ratatui::restore();
    result
}

/// Takes samples until a process owns the store and answers, with `pause` before each. Ctrl-C ends
/// the command during the wait. An owner that starts or recovers for long does not end the wait.
fn wait_for_owner(sample: &dyn Fn() -> Sampled, pause: Duration) -> Result<Sample, Failure> {
    let mut printed = String::new();
    loop {
        // Poll, because no event says that a process has taken the store's lock.
        std::thread::sleep(pause);
        match sample() {
            Ok(Some(owned)) => return Ok(owned),
            Ok(None) => {}
            Err(error) if error.kind() == ErrorKind::Retry => {
                let line = error.to_string();
                if line != printed {
                    print_stderr(&line);
                    printed = line;
                }
            }
            Err(error) => return Err(Failure::unopened(&error)),
        }
    }
}

/// Takes samples on a thread, so that the view reacts to keys while the owner is slow. The thread
/// ends after the receiver is dropped, or with the process.
fn sample_in_background(sample: impl Fn() -> Sampled + Send + 'static) -> Receiver<Sampled> {
    let (sender, samples) = sync_channel(1);
    std::thread::spawn(move || {
        let mut pause = REFRESH;
        loop {
            std::thread::sleep(pause);
            let sampled = sample();
            let is_silent = sampled.as_ref().is_err_and(OwnerSilent::caused);
            pause = if is_silent { SILENT_REFRESH } else { REFRESH };
            if sender.send(sampled).is_err() {
                return;
            }
        }
    });
    samples
}

/// Waits at most `time`. Returns true if the user ends the view.
fn quit_within(time: Duration) -> std::io::Result<bool> {
    let deadline = Instant::now() + time;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if !event::poll(left)? {
            return Ok(false);
        }
        // An event that is not a key, such as a resize, ends the wait, so that the screen is drawn
        // again.
        let Event::Key(key) = event::read()? else { return Ok(false) };
        let interrupted =
            key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
        let pressed = key.kind == KeyEventKind::Press;
        if pressed && (interrupted || matches!(key.code, KeyCode::Char('q') | KeyCode::Esc)) {
            return Ok(true);
        }
    }
}

fn draw(frame: &mut Frame<'_>, snapshot: &Snapshot, trouble: &str) {
    let lines = snapshot.lines();
    let parts = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Min(1),
        Constraint::Length(1),
    ]);
    let [full, hits, _, figures, foot] = parts.areas(frame.area());
    frame.render_widget(gauge("full", snapshot.fullness(), Color::Blue), full);
    let rate = snapshot.hits().unwrap_or(0.0);
    frame.render_widget(gauge("hits", rate, Color::Green), hits);
    let width = usize::from(figures.width.saturating_sub(NAME_WIDTH + 1));
    let rows = lines.into_iter().map(|(name, value)| {
        let lines = wrapped(&value, width);
        let height = u16::try_from(lines.len()).unwrap_or(u16::MAX);
        Row::new([name.to_owned(), lines.join("\n")]).height(height)
    });
    let columns = [Constraint::Length(NAME_WIDTH), Constraint::Min(10)];
    frame.render_widget(Table::new(rows, columns), figures);
    let foot_line = if trouble.is_empty() {
        Line::from("q ends").dim()
    } else {
        Line::from(trouble.to_owned()).red()
    };
    frame.render_widget(foot_line, foot);
}

/// Wraps `text` at `width` characters. A longer word gets a separate line.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        match lines.last_mut() {
            Some(line) if line.is_empty() => line.push_str(word),
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

fn gauge(name: &str, share: f64, colour: Color) -> Gauge<'static> {
    let style = Style::new().fg(colour).bg(Color::DarkGray);
    let label = format!("{name} {}", percent(share));
    Gauge::default().gauge_style(style).ratio(share.clamp(0.0, 1.0)).label(label)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use ritornello_format::Error;
    use ritornello_store::{CatalogStats, Options};
    use ritornello_terminal::exit::Status;
    use std::cell::RefCell;
    use std::path::PathBuf;

    #[test]
    fn wrapping_keeps_words_whole() {
        assert_eq!(wrapped("5 leases, 2 clients", 9), ["5 leases,", "2 clients"]);
        assert_eq!(wrapped("quarantined", 4), ["quarantined"]);
        assert_eq!(wrapped("", 4), [""]);
    }

    #[test]
    fn only_lasting_errors_end_the_wait_for_an_owner() {
        let waited = |answers: Vec<Sampled>| {
            let answers = RefCell::new(answers.into_iter());
            wait_for_owner(&|| answers.borrow_mut().next().unwrap(), Duration::ZERO)
        };
        let owned = || Ok(Some(Sample::new(PathBuf::new(), CatalogStats::default())));
        let recovers = || Err(Error::retry("the owner recovers"));
        assert!(waited(vec![Ok(None), recovers(), recovers(), Ok(None), owned()]).is_ok());
        let refused = Err(Error::invalid("another user owns the store"));
        let failure = waited(vec![recovers(), refused, owned()]).err().unwrap();
        assert_eq!(failure.status, Status::Unusable);
    }

    #[test]
    fn screen_shows_figures_at_several_sizes() {
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let mut options = Options::new(dir.path());
        (options.capacity, options.segment_bytes) = (Some(16 << 20), Some(1 << 20));
        let node = ritornello_node::open(&options).unwrap();
        let sample = || Sample::new(dir.path().to_owned(), node.store().stats().unwrap().catalog);
        let (before, now) = (sample(), sample());
        let snapshot = Snapshot::between(Some(&before), &now);
        for (width, height) in [(120, 20), (80, 24), (40, 50)] {
            let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
            terminal.draw(|frame| draw(frame, &snapshot, "the owner is away")).unwrap();
            let screen = terminal.backend().to_string();
            for word in [
                "full 0.0 %",
                "hits 0.0 %",
                "process",
                "quarantined",
                "leases",
                "adaptive",
                "per second",
                "away",
            ] {
                assert!(screen.contains(word), "{word}: {screen}");
            }
        }
        node.close().unwrap();
    }
}
