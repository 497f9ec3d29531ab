//! The command `paths restore`, in stores of three directories.
#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use common::{PAGE, index, ritornello, scratch, text};
use ritornello_format::Scope;
use ritornello_node::Node;
use ritornello_store::{Options, PutOptions, VOLUME_COPIES};
use ritornello_volume::BorrowedPages;
use ritornello_volume::transfer::Control;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

const PAGES: usize = 30;

fn keys() -> Vec<[u8; 16]> {
    (0..PAGES).map(|page| [page as u8 + 1; 16]).collect()
}

fn scope() -> Scope {
    Scope::opaque("restore", PAGE as u64, false)
}

fn options(dirs: &[PathBuf]) -> Options {
    let mut options = common::options(&dirs[0]);
    options.further_dirs = Some(dirs[1..].to_vec());
    options.index = index();
    options
}

fn open(dirs: &[PathBuf]) -> Arc<Node> {
    ritornello_node::open(&options(dirs)).unwrap()
}

/// Puts each page in its own run. The runs are spread over all directories.
fn fill(node: &Node) {
    for (number, key) in keys().iter().enumerate() {
        let page = vec![number as u8; PAGE];
        let pages = [page.as_slice()];
        let (source, options) = (BorrowedPages::new(&pages), PutOptions::default());
        let put = node.store().put_batch(&scope(), &[key], &source, &options, &Control::default());
        assert_eq!(put.unwrap().pages, 1);
    }
    node.store().flush().unwrap();
}

fn found(node: &Node) -> usize {
    let keys = keys();
    let keys: Vec<&[u8]> = keys.iter().map(<[u8; 16]>::as_slice).collect();
    node.store().exists(&scope(), &keys).unwrap().into_iter().filter(|found| *found).count()
}

fn wait_for(path: &Path) {
    let began = Instant::now();
    while !path.exists() {
        assert!(began.elapsed() < Duration::from_secs(20), "{}", path.display());
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn lost_first_directory_is_restored() {
    let root = scratch();
    let dirs = ["a", "b", "c"].map(|name| root.path().join(name));
    let restore = |dir: &Path, more: &[&str]| {
        let words = ["paths", "restore", text(dir), text(&dirs[1]), text(&dirs[2])];
        ritornello(&[&words[..], more].concat())
    };
    let refused = |dir: &Path, words: &str| {
        let answer = restore(dir, &[]);
        assert_eq!((answer.code, answer.out.as_str()), (2, ""), "{}", answer.err);
        assert!(answer.err.contains(words), "{}", answer.err);
        assert_eq!(answer.err.lines().count(), 1, "{}", answer.err);
    };
    let node = open(&dirs);
    fill(&node);
    for name in VOLUME_COPIES {
        wait_for(&dirs[1].join(name));
        wait_for(&dirs[2].join(name));
    }
    let new = root.path().join("new");
    refused(&new, &format!("stop all processes that use the store [pid={}]", std::process::id()));
    assert!(!new.exists(), "a refused restore must create nothing");
    node.close().unwrap();
    drop(node);
    refused(&dirs[0], "not empty");
    std::fs::remove_dir_all(&dirs[0]).unwrap();
    std::fs::create_dir(&dirs[0]).unwrap();
    let error = ritornello_node::open(&options(&dirs)).unwrap_err().to_string();
    let command = ["paths", "restore", text(&dirs[0]), text(&dirs[1]), text(&dirs[2])].join(" ");
    assert!(error.contains(&format!("`ritornello {command}`")), "{error}");
    let answer = restore(&dirs[0], &["--json"]);
    assert_eq!(answer.code, 0, "{}", answer.err);
    let salvaged = answer.json()["pages_salvaged"].as_u64().unwrap() as usize;
    assert!((PAGES / 2..PAGES).contains(&salvaged), "{}", answer.out);
    assert_eq!(
        (&answer.json()["scopes"], &answer.json()["absent"]),
        (&1.into(), &[(); 0][..].into())
    );
    refused(&dirs[0], "not empty");
    let node = open(&dirs);
    assert_eq!(found(&node), salvaged);
    fill(&node);
    assert_eq!(found(&node), PAGES);
    node.close().unwrap();
    let answer = ritornello(&["fsck", text(&dirs[0]), "--json"]);
    assert_eq!((answer.code, &answer.json()["pages"]), (0, &PAGES.into()), "{}", answer.err);
    let answer = ritornello(&["destroy", text(&dirs[0]), "--yes"]);
    let left = dirs.iter().filter(|dir| dir.exists()).count();
    assert_eq!((answer.code, left), (0, 0), "{}", answer.err);
}

#[test]
fn restore_prints_salvaged_pages_and_absent_directories() {
    let root = scratch();
    let dirs = ["a", "b", "c"].map(|name| root.path().join(name));
    let node = open(&dirs);
    fill(&node);
    node.close().unwrap();
    drop(node);
    std::fs::remove_dir_all(&dirs[0]).unwrap();
    std::fs::rename(&dirs[2], root.path().join("away")).unwrap();
    let moved = root.path().join("moved");
    let answer = ritornello(&["paths", "restore", text(&moved), text(&dirs[1])]);
    assert_eq!(answer.code, 1, "{}{}", answer.out, answer.err);
    for words in ["pages of 1 scopes salvaged", "c is absent: mount", "fsck", "next: start"] {
        assert!(answer.out.contains(words), "{words}: {}", answer.out);
    }
    std::fs::rename(root.path().join("away"), &dirs[2]).unwrap();
    let answer = ritornello(&["fsck", text(&moved), "--salvage", "--json"]);
    let pages = answer.json()["pages_salvaged"].as_u64().unwrap();
    assert!(pages > 0, "{}{}", answer.out, answer.err);
}

/// The lost first directory returns at another path. Its manifest still names the directories that
/// the restored store uses.
#[test]
fn returned_first_directory_is_not_destroyed() {
    let root = scratch();
    let dirs = ["a", "b", "c"].map(|name| root.path().join(name));
    let close = |node: Arc<Node>| node.close().unwrap();
    let node = open(&dirs);
    fill(&node);
    close(node);
    let returned = root.path().join("returned");
    std::fs::rename(&dirs[0], &returned).unwrap();
    let words = ["paths", "restore", text(&dirs[0]), text(&dirs[1]), text(&dirs[2])];
    let answer = ritornello(&words);
    assert_eq!(answer.code, 0, "{}", answer.err);
    let node = open(&dirs);
    fill(&node);
    close(node);
    let answer = ritornello(&["stat", text(&returned)]);
    assert_ne!(answer.code, 0, "{}", answer.out);
    assert!(answer.out.contains("restored in another directory"), "{}", answer.out);
    let answer = ritornello(&["destroy", text(&returned), "--yes"]);
    assert_ne!(answer.code, 0, "{}", answer.out);
    assert!(answer.err.contains("restored in another directory"), "{}", answer.err);
    let node = open(&dirs);
    assert_eq!(found(&node), PAGES);
    close(node);
}
